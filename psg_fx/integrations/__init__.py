"""psg_fx in other libraries' loops: each module imports its library, and none is imported by psg_fx."""
