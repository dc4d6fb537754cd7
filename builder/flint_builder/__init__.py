"""OFFLINE: checkpoint readers, repacking, graph export, plan build, and the command `build-engine`."""
