// Command controllermanager is kube-controller-manager: garbage collection,
// namespaces, DaemonSets, service accounts. A program of its own, built only
// when a test asks for controllers, so that the control plane stays small.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

func main() {
	os.Exit(cli.Run(app.NewControllerManagerCommand()))
}
