"""A small transformer that recalls, and its task: what the second act of ``headway demo`` is played with."""
