"""Every setting: a section per owner, and how they are read."""
