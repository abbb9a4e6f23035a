"""Workers: processes that compute tasks of one job, on this machine or on Ray.

A task is a function of a module of this package and its arguments. It returns plain values or leaves whole
files, and gives the same bytes wherever and however often it runs; so a task whose worker is killed runs
again on another one.
"""
