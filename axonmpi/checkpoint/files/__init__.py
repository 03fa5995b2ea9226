"""Files of a checkpoint: their format, their checksums, and the folder that has them."""
