"""Learners compared on the same instances, each in a process of its own: ``headway bench``."""
