"""What is on the disk: names, heads, manifests, folders, checksums."""
