"""Files and progress of every package: atomic writes, caches of folders, strict JSON, bars."""
