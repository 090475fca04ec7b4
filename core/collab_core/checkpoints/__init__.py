"""Checkpoints elsewhere: whole states on the Hub or in a folder, for the day when no peer is there any more.

statement.py    what the checkpointer signs
content.py      the files of a checkpoint, written and read
remotes.py      where they go: the Hub, or a folder
card.py         the README beside them
"""
