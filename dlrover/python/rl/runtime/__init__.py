"""Where things run: one process, those of a launcher, or Ray. The only room that imports Ray."""
