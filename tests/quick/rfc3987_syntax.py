"""Stands before the package of this name, which takes 2 s of a processor to import.

jsonschema checks with it whether a text is an Internet address of any script, and checks none
without it. No schema of a notebook asks for one, but each process that reads a notebook imports it.
"""

raise ImportError("not needed in tests")
