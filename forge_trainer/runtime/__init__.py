"""Runtime: meshes, handles and the loops of a run."""
