"""Where a search begins. Each start proposes heads that a refinement can take to the floor."""
