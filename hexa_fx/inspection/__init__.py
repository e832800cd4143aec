"""What people look at: graphs as data, pictures, pages, dumps, and numbers behind a report.

view -> roles -> stages      torch.fx graphs as plain data, who does what in them, one snapshot a pass
picture -> layout -> svg     what is drawn of a graph, where, and how; `dot` for graphviz
page                         a self-contained HTML page of stages side by side
kernels, costs               the kernels a block takes, also without a GPU; FLOPs, bytes and saved memory
dump, debug, logs            the same graphs as files, around named passes, and in logs
"""
