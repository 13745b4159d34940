"""Bytes from strangers against everything that reads them: nothing crashes, hangs, grows without limit, or raises what
it should not.

    python -m tests.fuzz --inputs 100000            # all targets
    python -m tests.fuzz --inputs 5000 --target lane --seed 7

Inputs are made from kept seeds (`seeds/`, one file each) by mutation and, where a target knows how, from structure. A
failing input is written beside the seeds: it is tried first from then on. A run is a function of its seed, as far as
threads allow.
"""
