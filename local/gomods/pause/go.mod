module busbar.dev/local/pause

go 1.26.0
