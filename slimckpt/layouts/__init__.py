"""Which part of each whole tensor each rank holds: the nouns, how splits are ruled, and readers of
what frameworks record of it. No tensor is read here: :mod:`slimckpt.views` reads by a layout."""
