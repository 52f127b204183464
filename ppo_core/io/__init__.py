"""Tools of all packages: files, a folder cache, validation, HTTP clients, progress bars."""
