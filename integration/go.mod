module example.com/lb/integration

go 1.26
