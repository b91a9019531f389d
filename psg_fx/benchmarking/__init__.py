"""`psg_fx.benchmark`: a step beside other ways to the same numbers, measured in the same rounds."""
