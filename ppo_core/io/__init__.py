"""Files and progress for all packages: atomic writes, folder cache, strict JSON, progress bars."""
