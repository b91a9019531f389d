"""Ops that stand for functions of the user: custom autograd functions, functions of one sample, operators trusted."""
