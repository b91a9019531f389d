"""The Python around a captured graph: what its code has read, what it has changed, and the modes it ran in.

A graph is what the user's Python did once.  It stands for another call only while everything that this Python reads
beside its tensors is as it was (`observe`, `walk`, `guard`), and only if what it changes is put back or written anew at
every call (`holders`, `effects`).  Captures do not see the caller's modes, and other threads do not see captures
(`ambient`).
"""
