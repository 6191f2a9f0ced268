"""Which exact plan answers a step: every legal one, its predicted finish and declared cost, and why each
lost.

Why it exists: where attention is computed is a choice among contracts that all give the same bits
(specification E.1, E.7), made from capability records, from where chunks lie, from credits and from measured
bandwidths. Pure: it must not know live tiers, sessions, clocks or how a plan is run.
"""
