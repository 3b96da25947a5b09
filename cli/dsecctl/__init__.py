"""`dsecctl`: the command line of dsecd. One file for each noun; what others could need is in the SDK."""
