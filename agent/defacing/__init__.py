"""Heads in MRI and CT: grids, masks of skin and brain, the privacy transform, and defacing methods.

Nothing here knows a file, a process or a clock; registration and the atlas are told in
(:mod:`agent.defacing.template`).
"""
