"""Fused operators, one a room, each with its plain twin (reference.py) and the reasons why not."""
