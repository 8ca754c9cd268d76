"""Drafters: who proposes the tokens that a verification pass checks. Nothing here knows torch."""
