// kube-control is the control plane of the one-machine cluster in one program: the name it is
// called by (a link) or its first argument says which part it is. One program instead of four
// because the parts share almost all of their code: it compiles once and is a third of the size.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func main() {
	args := os.Args
	args[0] = filepath.Base(args[0])
	if len(args) > 1 && commands()[args[0]] == nil && args[0] != "etcd" {
		args = args[1:]
	}
	if args[0] == "etcd" {
		etcdmain.Main(args)
		return
	}
	newCommand := commands()[args[0]]
	if newCommand == nil {
		fmt.Fprintln(os.Stderr, "usage: kube-control etcd|kube-apiserver|kube-controller-manager|kube-scheduler [flags]")
		os.Exit(2)
	}
	os.Args = args
	os.Exit(cli.Run(newCommand()))
}

func commands() map[string]func() *cobra.Command {
	return map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": controllermanager.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	}
}
