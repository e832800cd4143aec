"""Runs of one block in other modes, train or eval, under autocast or not: whether they show the same."""
