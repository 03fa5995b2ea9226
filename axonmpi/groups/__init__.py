"""Process groups, worlds and meshes of ranks."""
