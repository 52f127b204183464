"""What all packages use: files, a folder cache, validation, HTTP clients, progress bars."""
