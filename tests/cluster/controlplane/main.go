// Command controlplane is etcd and kube-apiserver in one static binary, chosen
// by the name it is called with. Tests and the demo run a real control plane
// from it on machines where no prebuilt one can be downloaded.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	switch name := filepath.Base(os.Args[0]); name {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(app.NewAPIServerCommand()))
	default:
		fmt.Fprintf(os.Stderr, "called as %q: link this binary as etcd or kube-apiserver\n", name)
		os.Exit(2)
	}
}
