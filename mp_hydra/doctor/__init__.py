"""`mp-hydra doctor`: what this machine computes fast in and why, and what is in the way.

facts.py and driver.py gather, judge.py holds the rules, measure.py times operations, show.py renders, story.py is the command.
"""
