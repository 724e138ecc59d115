module example.com/lb

go 1.26
