"""What runs where: meshes of processes, the stores they share, and their lifecycle."""
