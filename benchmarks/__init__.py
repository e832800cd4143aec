"""Programs that measure; a package, so that installed libraries with a folder of this name do not hide it."""
