"""Learners compared on the same instances, each in a process of its own: ``headway bench``.

apart.py does one run, race.py a list of them on any executor, tables.py says what came out.
"""
