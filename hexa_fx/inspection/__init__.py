"""Everything for people to look at: graphs as data, pictures, pages, dumps, and the numbers behind a report.

view -> roles -> stages      torch.fx graphs as plain data, what each node does, one snapshot per pass
picture -> layout -> svg     what is drawn of a graph, where, and how; `dot` for graphviz
page                         a self-contained HTML page of stages side by side
kernels, costs               the kernels a block takes, also without a GPU; FLOPs, bytes and saved memory
dump, debug, logs            the same graphs as files, around named passes, and in logs
"""
