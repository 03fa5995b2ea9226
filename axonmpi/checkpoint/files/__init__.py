"""The files of a checkpoint: headers, JSON, checksums, and the folder that is replaced as one."""
