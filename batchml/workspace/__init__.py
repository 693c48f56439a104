"""The workspace, the folder that all runs of an environment share: list, copy, archive, restore."""
