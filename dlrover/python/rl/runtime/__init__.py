"""Where things run: one process, or Ray. The only room that imports Ray."""
