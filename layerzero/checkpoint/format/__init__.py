"""The on-disk format: names, file headers, manifests, folders, checksums."""
