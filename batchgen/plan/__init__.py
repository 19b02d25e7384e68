"""The known future: order, trie, groups, estimate. numpy and pyarrow, no torch."""
