"""Measurements that ``sennit bench`` prints, each beside a check of what was measured."""
