"""Heads in MRI and CT: masks of skin and brain, the privacy transform, defacing methods, and attacks on them.

The algorithms take arrays and return arrays. These modules know files or programs: :mod:`agent.defacing.batch` the
files of a folder, :mod:`agent.defacing.engine` the studies that are read and written,
:mod:`agent.defacing.training_heads` a folder of public heads, the trainings in :mod:`agent.defacing.deid_gan` a
folder of checkpoints, and :mod:`agent.defacing.template` the atlas and the program that registers to it.
"""
