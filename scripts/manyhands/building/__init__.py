"""Building: a lesson's source read, its notebook run, and its minutes counted."""
