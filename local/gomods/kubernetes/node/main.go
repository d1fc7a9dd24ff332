// kube-node is the kubelet and kube-proxy in one program; the name it is called by (a link) or its
// first argument says which.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	args := os.Args
	args[0] = filepath.Base(args[0])
	if len(args) > 1 && args[0] != "kubelet" && args[0] != "kube-proxy" {
		args = args[1:]
	}
	os.Args = args
	var command *cobra.Command
	switch args[0] {
	case "kubelet":
		// The kubelet installs its own signal handler; handing it a signal context panics.
		command = kubelet.NewKubeletCommand(context.Background())
	case "kube-proxy":
		command = proxy.NewProxyCommand()
	default:
		fmt.Fprintln(os.Stderr, "usage: kube-node kubelet|kube-proxy [flags]")
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}
