"""Placement policies of a cache: FlexGen's joint placement, HeadInfer's head groups, NEO's whole requests.

Why it exists: each answers "which rows lie where, and where are they attended" by its own arithmetic, and a
cache declares which. Pure: it must not know tiers, sessions, clocks or how a step is run; a policy ends in a
`preference.PlacementPreference`, which a step's planner obeys.
"""
