"""Models that exist already.

recipes    what a module that is a norm computes, as data, and how it is called
recognise  which recipe a module follows, found by a probe
patch      norms swapped in place, and put back
"""
