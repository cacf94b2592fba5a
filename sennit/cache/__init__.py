"""The paged cache's parts: page ids and reference counts, sequences and page tables, and the memory behind them."""
