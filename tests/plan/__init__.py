"""Tests of lazyshard.plan."""
