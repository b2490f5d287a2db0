"""Passes written by hand because they were measured to win, each compared with the plain one that it stands for."""
