// Command etcd is the etcd server. The released one of Debian lacks watch progress, which newer Kubernetes clients need.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
