"""Engines that run work in other processes, on this machine or a cluster: Ray, and Slurm through submitit.

What is run is a function by its name and arguments that JSON can hold; `worker.perform` runs it there.
"""
